//! Real brokers, faults and history checks for the tests of anymq.
