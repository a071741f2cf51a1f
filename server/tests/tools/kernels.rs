use crate::support::{golden, run};

#[test]
fn kernels_lists_contracts_and_the_steps_that_run_them() {
    golden("kernels.txt", &run(&["kernels"]).succeeded().out);
}

#[test]
fn every_launch_of_the_plan_is_counted_once() {
    let (kernels, inspect) = (run(&["kernels", "--json"]).succeeded().json(), run(&["inspect", "--json"]).json());
    let rows = kernels["kernels"].as_array().expect("a list");
    assert_eq!(rows.len(), inspect["kernels"].as_array().expect("a list").len());
    let used: usize = rows
        .iter()
        .flat_map(|row| row["uses"].as_array().expect("a list"))
        .map(|used| used["steps"].as_array().expect("a list").len())
        .sum();
    let steps: u64 = inspect["entries"].as_array().expect("a list").iter().filter_map(|entry| entry["steps"].as_u64()).sum();
    assert_eq!(used as u64, steps);
    assert_eq!(kernels["artifacts"].as_array().map(Vec::len), Some(0), "cpu has no code objects");
}
