"""Lets sessions and clients of botocore share what is the same for all; importing it is enough.

Every test has sessions and clients of its own. Making all of each anew would take most of the time.
"""

import botocore.session
from botocore import endpoint_provider, handlers, hooks
from botocore.client import ClientCreator

LOADER = botocore.session.create_loader()
botocore.session.create_loader = lambda *_: LOADER

# SageMaker's clients have 409 methods. A method keeps nothing of its client, and each client has a
# class of its own all the same: executors put bounds into it.
METHODS = {}
_make_methods = ClientCreator._create_methods


def _methods_of(creator, model):
    if model.service_name not in METHODS:
        METHODS[model.service_name] = _make_methods(creator, model)
    return dict(METHODS[model.service_name])


ClientCreator._create_methods = _methods_of

# A service's model makes the shapes of requests and answers when they are first looked up, and each
# client would have a model of its own.
MODELS = {}
_load_model = ClientCreator._load_service_model


def _model_of(creator, name, api_version=None):
    if (name, api_version) not in MODELS:
        MODELS[name, api_version] = _load_model(creator, name, api_version)
    return MODELS[name, api_version]


ClientCreator._load_service_model = _model_of

# Each session looks up anew what its hundreds of events are called; the names are always the same.
NAMES = {}
_make_aliaser = hooks.EventAliaser.__init__


def _with_shared_names(aliaser, *arguments):
    _make_aliaser(aliaser, *arguments)
    aliaser._alias_name_cache = NAMES


hooks.EventAliaser.__init__ = _with_shared_names

# Each session registers what botocore does for some services and for its documentation, and each
# client copies that.
SERVICES = {"sagemaker", "logs", "s3", "sts", "*"}
handlers.BUILTIN_HANDLERS[:] = [
    each
    for each in handlers.BUILTIN_HANDLERS
    if SERVICES.issuperset(each[0].split(".")[1:2]) and not each[0].startswith("docs.")
]

# Each session checks the signature of each handler anew.
ACCEPTED = {}
_check_signature = hooks.accepts_kwargs


def _accepts(handler):
    code = getattr(handler, "__code__", None)  # of a function or method; it keeps nothing alive
    if code is None:
        return _check_signature(handler)
    if code not in ACCEPTED:
        ACCEPTED[code] = _check_signature(handler)
    return ACCEPTED[code]


hooks.accepts_kwargs = _accepts

# Each client makes the tree of rules by which its endpoint is found; it is only read.
RULES = {}


def _shared_rules(partitions, **rules):
    key = id(rules["rules"]), id(partitions)
    if key not in RULES:  # with what it was made of, so that nothing else gets its identity
        RULES[key] = _make_rules(partitions=partitions, **rules), rules, partitions
    return RULES[key][0]


_make_rules = endpoint_provider.RuleSet
endpoint_provider.RuleSet = _shared_rules
