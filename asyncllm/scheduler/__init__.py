"""Who runs when: waiting order, admission, batches; plain Python over ints and numpy."""
