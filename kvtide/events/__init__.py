"""`kvtide events`: a subscriber to the scheduler's KV events that shows which prefix lies in which tier."""
