"""Models that see: their towers, and how pictures become what towers read."""
