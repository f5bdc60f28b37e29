"""Which page holds what: pool, page table, prefix caches; plain Python over ints and numpy."""
