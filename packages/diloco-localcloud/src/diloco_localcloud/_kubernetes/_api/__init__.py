"""The API over HTTP: from a request to an answer."""
