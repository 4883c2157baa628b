"""What a session is, declared once by its dataclasses' fields, and what is generated from that; knows no session."""
