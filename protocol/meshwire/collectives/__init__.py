"""Who sends what to whom and when, as data (a topology's program), and one bucket on its way through such a program (an
exchange).
"""
