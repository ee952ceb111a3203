# fmt: off
from .building import Site as Site, build_site as build_site
from .command import site as site
from .plan_form import plan_form_html as plan_form_html
