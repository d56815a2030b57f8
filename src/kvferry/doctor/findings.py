"""All findings of a deployment, and their worst result. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.doctor.control_checks import common_findings
from kvferry.doctor.facts import DeploymentFacts
from kvferry.doctor.finding import Finding, Result
from kvferry.doctor.fleet_checks import fleet_findings
from kvferry.doctor.instance_checks import instance_findings
from kvferry.doctor.transfer_checks import transfer_findings


def findings_of(facts: DeploymentFacts) -> list[Finding]:
    """Return what is found of each instance, of all together, and of handoffs between them."""
    are_hosts_mixed = len({instance.host for instance in facts.instances}) > 1
    found: list[Finding] = []
    for instance in facts.instances:
        routed = facts.routed(instance.url)
        found += instance_findings(instance, routed, are_hosts_mixed=are_hosts_mixed)
    found += common_findings(facts)
    found += fleet_findings(facts)
    found += transfer_findings(facts)
    return found


def worst(findings: Sequence[Finding]) -> Result:
    """Return the worst result among ``findings``; none at all is fine."""
    results = {finding.result for finding in findings}
    for result in (Result.FAILED, Result.WARNING):
        if result in results:
            return result
    return Result.OK
