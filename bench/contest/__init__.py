"""Compare ours with torch and torchao: the cases, the gates that a timing must pass, the bars it is held to."""
