"""Calls over the network, with credentials, connections and errors."""
