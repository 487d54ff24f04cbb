"""The training side: from step marks to published traces. Knows no trainer and no command line."""
