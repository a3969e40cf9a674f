"""The part that the stand-ins for all clouds share."""
