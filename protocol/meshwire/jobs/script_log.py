"""Lines that frame, in a rank's log, the error that its script ended by.

Whoever follows a job is told of the error once, in few words, and does not see what stands between them; `meshtrain
logs` shows it all.
"""

ERROR_BEGINS = "-- meshtrain: the script ends by this error --"
ERROR_ENDS = "-- meshtrain: end of the error --"
