"""Data: which samples go to whom.

leases.py  LeaseBook: every sample of an epoch goes to exactly one worker, whoever comes or dies
"""

from paceline.data.leases import Lease, LeaseBook

__all__ = ["Lease", "LeaseBook"]
