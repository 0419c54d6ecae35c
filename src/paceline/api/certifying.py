"""Certificates for a run, made beforehand."""

from paceline.comm.certificates import make_directory as make_certificates
from paceline.comm.tls import ROLES

__all__ = ["ROLES", "make_certificates"]
