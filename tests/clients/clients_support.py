"""What the tests of foreign clients share."""

API_KEY = "clients-key"
"""The key of the server that the fixture ``url`` starts."""
