"""Splits models into a frozen region and a tail; finds, plans and packs cuts.

In: a user's model, a package, measured costs. Out: a frozen region, a tail, a
package file, a plan. Contains no HTTP and no Swift.
"""
