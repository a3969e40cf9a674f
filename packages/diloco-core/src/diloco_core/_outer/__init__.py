"""The outer step: fragments with their global copies, and the outer optimizer."""
