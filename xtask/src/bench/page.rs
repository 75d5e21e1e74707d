//! The page with the tables of all benchmarks; each has its place between two marks.

use crate::Outcome;

const PAGE: &str = "docs/performance.md";

/// Puts a table in its place.
pub(super) fn write(bench: &str, table: &str) -> Outcome {
    let (begin, end) = (format!("<!-- bench {bench}: begin -->"), format!("<!-- bench {bench}: end -->"));
    let page = std::fs::read_to_string(PAGE).map_err(|e| format!("{PAGE}: {e}"))?;
    let (Some(from), Some(to)) = (page.find(&begin), page.find(&end)) else {
        return Err(format!("{PAGE} has lost its marks {begin} and {end}"));
    };
    let page = format!("{}{begin}\n\n{table}\n{}", &page[..from], &page[to..]);
    std::fs::write(PAGE, page).map_err(|e| format!("{PAGE}: {e}"))
}
