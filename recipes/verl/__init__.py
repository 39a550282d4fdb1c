"""Register what `recipes.verl` has with veRL: VERL_USE_EXTERNAL_MODULES=recipes.verl."""

from recipes.verl import engine as engine
from recipes.verl import losses as losses
