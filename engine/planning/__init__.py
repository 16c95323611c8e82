"""What a load would meet on cards that are not here: the real scheduler under a virtual clock."""
