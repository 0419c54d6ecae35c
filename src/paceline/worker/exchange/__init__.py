"""A worker's exchange with the servers."""
