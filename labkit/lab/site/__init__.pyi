# fmt: off
from .plan_form import plan_form_html as plan_form_html
