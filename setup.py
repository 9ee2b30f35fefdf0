"""What pyproject.toml has no words for: three folders of the checkout lie inside the package in a wheel."""

from setuptools import find_packages, setup

INSIDE = {
    "mup_megatron.patches": "patches",
    "mup_megatron.util.shipped.configs": "configs",
    "mup_megatron.util.shipped.launch": "launch",
}

setup(
    packages=[*find_packages(include=["mup_megatron*"]), *INSIDE],
    package_dir=INSIDE,
    package_data={
        "mup_megatron.patches": ["*/series", "*/*.patch"],
        "mup_megatron.report": ["*.js"],
        "mup_megatron.util.shipped.configs": ["**/*.yaml", "**/*.json"],
        "mup_megatron.util.shipped.launch": ["**/*.sh", "**/*.sbatch"],
    },
)
