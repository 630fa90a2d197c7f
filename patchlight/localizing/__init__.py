"""Where the subject of a photo is: heat maps by several methods, and the boxes around what they light up."""
