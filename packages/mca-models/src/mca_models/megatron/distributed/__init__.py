"""Process groups, and what ranks say to one another."""
