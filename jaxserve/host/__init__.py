"""Who runs next, and on which pages. Imports nothing above the ground floor."""
