"""From a checkpoint to what runs it elsewhere."""
