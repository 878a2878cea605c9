"""Give each device of a fleet one model of a task and one cut, by measurement."""
