"""Local steps between two rounds (`--sync local:H`): their weights, Muon for some of them, the outer step."""
