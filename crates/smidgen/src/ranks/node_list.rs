//! Slurm's short forms: `node[01-03,7],gpu5` for hosts and `4(x2),3` for tasks per node.
//!
//! Slurm has commands that expand them, but they may not be installed where a rank runs.
//! Left out: steps inside a range, which Slurm does not write.

/// More hosts than any cluster has. Longer lists are refused.
const MOST: usize = 1 << 16;

/// The hosts of a list, in order; `None` if the list is malformed.
pub fn expand_nodes(list: &str) -> Option<Vec<String>> {
    let mut hosts = Vec::new();
    for name in split_outside_brackets(list)? {
        let mut prefixes = vec![String::new()];
        let mut rest = name;
        while let Some((before, after)) = rest.split_once('[') {
            let (ranges, after) = after.split_once(']')?;
            let numbers = expand_ranges(ranges)?;
            if prefixes.len().checked_mul(numbers.len())? > MOST {
                return None;
            }
            let with = |prefix: &String| {
                numbers.iter().map(|number| format!("{prefix}{before}{number}")).collect::<Vec<_>>()
            };
            prefixes = prefixes.iter().flat_map(with).collect();
            rest = after;
        }
        hosts.extend(prefixes.into_iter().map(|prefix| prefix + rest));
        if hosts.len() > MOST {
            return None;
        }
    }
    let is_valid = !hosts.is_empty() && hosts.iter().all(|host| !host.is_empty() && !host.contains(']'));
    is_valid.then_some(hosts)
}

/// The number of tasks of a node: `4(x2),3` means 4, 4 and 3.
pub fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    let mut seen = 0usize;
    for entry in list.split(',') {
        let (tasks, nodes) = match entry.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1),
        };
        seen = seen.checked_add(nodes)?;
        if node < seen {
            return tasks.trim().parse().ok();
        }
    }
    None
}

fn split_outside_brackets(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut start, mut is_inside) = (Vec::new(), 0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' if is_inside => return None,
            '[' => is_inside = true,
            ']' => is_inside = false,
            ',' if !is_inside => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    (!is_inside).then_some(parts)
}

/// Expands `01-03,7` to 01, 02, 03 and 7; leading zeros are kept.
fn expand_ranges(ranges: &str) -> Option<Vec<String>> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (from, to): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if from > to || to - from >= MOST {
            return None;
        }
        let width = first.len();
        numbers.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_lists_are_expanded() {
        let cases: [(&str, &[&str]); 6] = [
            ("node[01-03,7],gpu5", &["node01", "node02", "node03", "node7", "gpu5"]),
            ("host", &["host"]),
            ("a,b", &["a", "b"]),
            ("r[1-2]n[08-09]-ib", &["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
            ("n[9-11]", &["n9", "n10", "n11"]),
            ("n[099-101]", &["n099", "n100", "n101"]),
        ];
        for (list, hosts) in cases {
            assert_eq!(expand_nodes(list).unwrap(), hosts, "{list}");
        }
    }

    #[test]
    fn malformed_lists_are_refused() {
        for list in ["", "n[", "n[1-2", "n[2-1]", "n[a]", "n[[1]]", "n]", "a,,b", "n[0-99999999]"] {
            assert_eq!(expand_nodes(list), None, "{list}");
        }
        assert_eq!(expand_nodes("n[0-999][0-999]"), None);
    }

    #[test]
    fn tasks_per_node_are_read() {
        let of = |list| (0..4).map(|node| tasks_on_node(list, node)).collect::<Vec<_>>();
        assert_eq!(of("4(x2),3"), [Some(4), Some(4), Some(3), None]);
        assert_eq!(of("8"), [Some(8), None, None, None]);
        assert_eq!(of("x"), [None; 4]);
        assert_eq!(of("4(x2"), [None; 4]);
    }
}
