"""A story-telling model trained from nothing in half an hour on two CPU cores."""
