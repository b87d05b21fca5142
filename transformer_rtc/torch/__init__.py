"""What torch needs beside calls on tensors. Imported where a tensor requires grad, and never without torch."""
