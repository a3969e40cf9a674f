"""What an exchange is, what all of them need, and those that need no store."""
