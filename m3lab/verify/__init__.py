"""What a launch published against the references: see ``m3lab.verify.verify``."""

from m3lab.verify.verify import same_bits as same_bits
from m3lab.verify.verify import verify as verify
