"""A decode step: what is asked for, its inputs and memory, launching it, and many in a row."""

from m3lab.step.step import DecodeStep as DecodeStep
from m3lab.step.step import Mailboxes as Mailboxes
from m3lab.step.step import StepInputs as StepInputs
from m3lab.step.step import StepResult as StepResult
from m3lab.step.step import build_for as build_for
