"""Compare this package with torch and torchao: cases, gates that a result must pass, and bars for its speed."""
