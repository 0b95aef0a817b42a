"""The round machine's shell: it lives here with its timer, its history and its trace, and its effects are performed in
order.
"""
