"""Data: which samples go to whom.

leases.py  LeaseBook: every sample of an epoch goes to exactly one worker, whoever comes or dies
digits.py  scikit-learn's handwritten digits, the data set that is always there (imports torch)
"""

from paceline.data.leases import Lease, LeaseBook

__all__ = ["Lease", "LeaseBook"]
