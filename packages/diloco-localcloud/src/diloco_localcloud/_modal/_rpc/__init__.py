"""The path from a request over gRPC to its answer.

Needs the extra ``modal``, and is imported when a stand-in starts.
"""
