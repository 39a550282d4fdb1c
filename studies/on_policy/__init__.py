"""What writes the text that a cartridge learns from: the student, the teacher, or both."""
