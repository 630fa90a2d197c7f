"""Training: from scratch, fine-tuning, distillation; stopped anywhere and resumed exactly."""
