//! Integration tests of the compiler: plans of real shapes, properties of the planner, snapshots.

mod shapes;

mod utilization;
