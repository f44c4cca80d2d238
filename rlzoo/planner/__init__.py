"""What a run will take, computed from its configuration and its model's shape alone: memory, work, time, disk."""
