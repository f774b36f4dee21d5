"""The processes of a run: who they are, how they share work, what they send each other."""
