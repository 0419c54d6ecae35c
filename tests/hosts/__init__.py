"""Runs on several hosts, which are network namespaces (make hosts)."""
