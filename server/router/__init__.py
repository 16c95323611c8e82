"""Before servers of several hosts: which of them gets a request, and its answer passed on as it comes."""
