"""math-verify's own comparison of a completion with a solution, as TRL's rewards ask for it. Imports no jax."""


def verified(completion: str, solution: str) -> tuple[float | None, str, str]:
    r"""Compares a completion with a solution by math-verify's definitions.

    Args:
        completion: Text whose first answer in LaTeX counts, one in `\boxed{}` before others.
        solution: Text of the solution.

    Returns:
        1 or 0, or None if math-verify cannot read the solution; then how it reads the solution, and the completion.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    gold = parse(solution, parsing_timeout=0)
    if not gold:
        return None, "[unparseable]", "[skipped]"
    how = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    found = parse(completion, extraction_config=[how], extraction_mode="first_match", parsing_timeout=0)
    is_right = verify(gold, found, timeout_seconds=None)
    return float(is_right), str(gold), str(found) if found else "[unparseable]"
