"""Data sets.

digits.py  scikit-learn's handwritten digits, the data set that is always there (imports torch)
"""

__all__: list[str] = []
