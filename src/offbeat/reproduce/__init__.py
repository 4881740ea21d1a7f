"""The paper's figures from one command: `offbeat reproduce TARGET`."""
