"""What every byte on a link belongs to: 80 bytes of header in front of each payload, and a parser that says where the
next bytes go before they are read.
"""
