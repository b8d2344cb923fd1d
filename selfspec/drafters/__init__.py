OWN_KINDS = "selfspec.drafters"  # the group of entry points of other packages' drafters, each `name = "package:Class"`
